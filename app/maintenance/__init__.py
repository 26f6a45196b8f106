"""What must happen without being asked."""
