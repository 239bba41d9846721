"""Stand-ins: one parameter of each class of like parameters is traced, and compiled for all."""
