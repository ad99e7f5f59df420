"""What happens after a promotion: events of the registry in, a state that is right out."""
