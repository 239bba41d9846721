"""Before AOTAutograd: one member of each class of like parameters, and finite quotients."""
