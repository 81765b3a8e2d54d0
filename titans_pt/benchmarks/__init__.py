"""Measurements that a user can repeat: ratios within one run, with hardware and versions."""
