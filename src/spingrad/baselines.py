"""What QP-SBGD is measured against: other ways to train the same binary layers."""

from spingrad.optim.baselines import BinaryConnect, Bop, ProxQuant, SignSGD

__all__ = ["BinaryConnect", "Bop", "ProxQuant", "SignSGD"]
