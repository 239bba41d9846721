"""`Explanation.save`: what a step was made into as one HTML file that needs no network."""
