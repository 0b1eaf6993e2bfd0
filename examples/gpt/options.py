"""How --help of every script shows defaults."""

import argparse


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """With the default of each option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False:
            return action.help
        return super()._get_help_string(action)
