"""End-to-end harness: brokers, S3 servers, publishers and consumers, and what every byte must be.

Owns what runs outside the broker. Knows nothing about how the plugin works inside.
"""
