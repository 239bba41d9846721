"""Trace one parameter of each class of like parameters, and compile for all of the class."""
