"""The paper's experiments, and ours at full size: ``spinstep paper run NAME``."""
