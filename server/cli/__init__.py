"""The command line: serve, plan and doctor, and what puts a server together."""

from server.cli.commands import main as main
