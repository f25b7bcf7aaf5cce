"""Schedule: a kernel -> launches, with what they take for granted and what they cost."""
