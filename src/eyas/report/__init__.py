"""Results for people: tables and sentences. Nothing here computes; numbers come from the summary of a run."""
