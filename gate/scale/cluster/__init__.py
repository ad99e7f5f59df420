"""Measuring units on a Ray cluster."""
