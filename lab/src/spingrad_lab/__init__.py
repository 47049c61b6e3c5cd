"""The paper's experiments, and ours at full size: ``spingrad-lab run NAME``."""
