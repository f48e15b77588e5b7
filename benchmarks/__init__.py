"""Side-by-side runs against peers and roofs, and their recorded results."""
