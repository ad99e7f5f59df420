"""Measuring units in several processes, on this machine or on others."""
