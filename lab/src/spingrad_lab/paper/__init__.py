"""The experiments of the QP-SBGD paper, one module for each kind."""
