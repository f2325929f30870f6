"""From closed rows to the accountant: durable here until they are durable there."""
