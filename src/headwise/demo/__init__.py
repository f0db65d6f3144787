"""The demo: a small transformer that trains, speaks and shows its attention, all with Headwise ops."""
