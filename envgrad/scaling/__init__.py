"""What a run will take on machines that nobody has started yet: an analytical plan, and a simulation that checks it."""
