"""`doctor`: what a training run that uses nothing of collage_fx loses in its optimizer's steps."""
