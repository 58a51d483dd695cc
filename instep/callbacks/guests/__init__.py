"""Optional callbacks: the Trainer never imports them; a run has one only if the user or a package adds it."""
