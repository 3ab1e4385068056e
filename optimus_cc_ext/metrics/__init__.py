"""What is measured and logged: bytes by traffic class, what compression leaves out, what it costs."""
