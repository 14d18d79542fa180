"""Models of gradwire's schemes: what each sends, when, and what that costs in codec time."""
