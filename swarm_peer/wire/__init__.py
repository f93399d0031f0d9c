"""The bytes that peers exchange: signed DHT records, call messages, tensor codecs. No I/O here."""
