"""Experiments that go beyond the paper."""
