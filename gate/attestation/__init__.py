"""Statements: who vouches for a verdict, in a form that anybody can check."""
