"""Tools of your own, which the model calls in its turns: --data.template="$(python examples/own_tools.py)"."""

import ast
import operator
import sys
from fractions import Fraction
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from envs.adapters import tools

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def calc(expression: str) -> str:
    """Compute an expression of numbers, + - * / and brackets; fractions stay exact."""

    def value(node):
        if isinstance(node, ast.BinOp):
            return OPERATIONS[type(node.op)](value(node.left), value(node.right))
        number = ast.literal_eval(node)
        if type(number) not in (int, float):  # '1e9999999' in quotes would take minutes
            raise ValueError("there are only numbers, + - * / and brackets")
        return Fraction(str(number))

    return str(value(ast.parse(expression.strip(), mode="eval").body))


calculator = tools(calc)  # its answers are graded by --reward.also=math=1, within the time that a grading has
TEMPLATE = (
    f"{{prompt}}\n\nPut the answer into \\boxed{{}}. First you may call tools, in a turn each:\n{calculator.__doc__}"
)

if __name__ == "__main__":
    print(TEMPLATE)
