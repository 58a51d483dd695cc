"""What a job's processes say of themselves: heartbeats, errors, status; and the reports made of them."""
