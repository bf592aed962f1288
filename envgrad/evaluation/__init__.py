"""What an evaluation says: estimates with their uncertainty, from the groups that were played. Imports no torch."""
