"""The command line: commands such as serve, plan and doctor, and the assembly of a server."""

from server.cli.commands import main as main
