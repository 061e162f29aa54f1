"""An environment of your own: `python environments.py examples/own_environment.py:retry --data runs/own.jsonl`."""


def retry(row, seed):
    text = ""
    for tries in range(3):
        action = yield text
        if action.rpartition("=")[2] == row["answer"]:
            return 1 - tries / 4
        text = "\nWrong, try again: "
