"""Before AOTAutograd: leave one member of each class of like parameters in the graph."""
