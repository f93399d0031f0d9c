"""Agreement, sans-I/O: who has a seat, who is in a round, and what counts. docs/protocol.md is its specification.

State machines that take messages and give messages. They know no clock, no chance but what is passed in, no tensors and
no network. The wire checks signatures, sizes and passes before a message comes here.
"""
