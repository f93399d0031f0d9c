"""What peers say to each other, as bytes: signed DHT records, call messages, tensor codecs. No I/O here."""
