"""Measurements that a user can repeat: ratios in one run, hardware and versions beside them."""
