"""`Explanation.save`: the rewrite of a step as one HTML file that needs no network."""
