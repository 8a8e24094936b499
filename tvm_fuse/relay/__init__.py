"""The Relay front end; with ``schedules/`` the only code that may import TVM (through ``compat``)."""
