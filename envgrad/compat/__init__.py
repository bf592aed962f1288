"""What scripts written for trl import beside trainers and configurations."""
