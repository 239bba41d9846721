"""Changes of parameters: which elements steps have changed since somebody asked."""
