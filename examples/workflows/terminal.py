"""A shell agent: its commands run in a sandbox, and tests of the files are the reward. Tasks are made on the spot."""

import itertools
import random

LETTERS = "abcd"
KINDS = {  # task, command that does it, what is there before, and the test
    "copy {x} to {y}": ("cp {x} {y}", "echo {n} > {x}", '[ "$(cat {x}) $(cat {y})" = "{n} {n}" ]'),
    "move {x} to {y}": ("mv {x} {y}", "echo {n} > {x}", '[ ! -e {x} ] && [ "$(cat {y})" = {n} ]'),
    "write {n} to {x}": ("echo {n} > {x}", "echo {y} > {x}", '[ "$(cat {x})" = {n} ]'),
    "remove {x}": ("rm {x}", "touch {x} {y}", "[ ! -e {x} ] && [ -e {y} ]"),
    "make folder {x}": ("mkdir {x}", "touch {y}", "[ -d {x} ] && [ -f {y} ]"),
}


def tasks(seed, size, test):
    """Rows of the training set, or of the test set, which has other combinations of file names."""
    rng = random.Random(seed)
    names = [(x, y) for x, y in itertools.permutations(LETTERS, 2) if ((ord(x) + 3 * ord(y)) % 5 == 0) == test]
    rows = []
    for _ in range(size):
        (x, y), n, task = rng.choice(names), rng.randrange(10), rng.choice(list(KINDS))
        question, answer, before, check = (text.format(x=x, y=y, n=n) for text in (task, *KINDS[task]))
        messages = [{"role": "user", "content": question}]
        rows.append({"question": messages, "answer": answer, "before": before, "test": check})
    return rows


def train():
    return tasks(seed=0, size=8192, test=False)


def test():
    return tasks(seed=1, size=64, test=True)


async def run(row, client, sandbox):
    messages = list(row["question"])
    await sandbox.run(row["before"])
    for reward in (1.0, 0.5):  # a second command may mend the first
        completion = await client.chat.completions.create(model="policy", messages=messages)
        answer = completion.choices[0].message
        result = await sandbox.run((answer.content or "").replace("\0", ""), timeout_s=5)
        if (await sandbox.run(row["test"])).status == 0:
            return reward
        messages += [answer, {"role": "user", "content": f"status {result.status}"}]
    return 0.0
