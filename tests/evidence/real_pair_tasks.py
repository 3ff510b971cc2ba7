"""What people ask of a coding model, one conversation of each of eight kinds. Written for this project.

Every system message begins with other words, so that no prompt shares more than a few tokens with another.
"""

from __future__ import annotations

QUEUE = '''class RetryQueue:
    """Jobs that are tried again, with a growing pause, until they succeed or have failed too often."""

    def __init__(self, limit=5, pause=0.5):
        self.limit = limit
        self.pause = pause
        self.jobs = []
        self.failed = []

    def add(self, job, *args):
        self.jobs.append((job, args, 0))

    def run(self):
        while self.jobs:
            job, args, tries = self.jobs.pop(0)
            try:
                job(*args)
            except Exception as error:
                if tries + 1 >= self.limit:
                    self.failed.append((job, args, error))
                else:
                    time.sleep(self.pause * 2 ** tries)
                    self.jobs.append((job, args, tries + 1))
'''

INVENTORY = """def load_inventory(path):
    items = {}
    with open(path) as handle:
        for row in csv.DictReader(handle):
            items[row["sku"]] = {"name": row["name"], "count": int(row["count"]), "price": float(row["price"])}
    return items


def low_stock(items, limit):
    found = []
    for sku, item in items.items():
        if item["count"] < limit:
            found.append((sku, item["name"], item["count"]))
    return sorted(found, key=lambda entry: entry[2])


def total_value(items):
    total = 0.0
    for sku, item in items.items():
        total += item["count"] * item["price"]
    return round(total, 2)
"""

INTERVALS = '''def merge_intervals(intervals):
    """Merge overlapping intervals, given as (start, end) with start <= end."""
    merged = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def free_gaps(intervals, start, end):
    """The gaps between the intervals, within start and end."""
    gaps = []
    for busy_start, busy_end in merge_intervals(intervals):
        if busy_start > start:
            gaps.append((start, min(busy_start, end)))
        start = max(start, busy_end)
    if start < end:
        gaps.append((start, end))
    return gaps
'''

LEDGER = """def apply_payments(accounts, payments):
    balances = dict(accounts)
    refused = []
    for payment in payments:
        source, target, amount = payment
        if amount <= 0 or balances.get(source, 0) < amount:
            refused.append(payment)
            continue
        balances[source] -= amount
        balances[target] = balances.get(target, 0) + amount
    return balances, refused
"""

ORDERS = """Order 1041 of 3 March came from Mara Lindqvist in Uppsala: two oak stools at 89.50 each and a jar of wax at
12.00. She paid by card and wants it by the 12th. Order 1042, the same day, is Tomas Rehak's in Brno, who took a shelf
for 240.00, six brackets at 4.25 each, and asked for an invoice; he has not paid. Order 1043 is from the Oduya school
in Kisumu: thirty stools at 71.00 each, paid by transfer on 5 March, to be delivered in two lots."""


def fenced(code: str) -> str:
    return f"```python\n{code}```"


# kind: (system message, question)
TASKS = {
    "edit": (
        "As an editor's assistant, change code as asked and give back the whole changed code in one block.",
        f"Add type hints to every method, and make the pause at most 30 seconds.\n\n{fenced(QUEUE)}",
    ),
    "rename": (
        "Rename things in the code that the user sends, and give it back complete, with nothing else changed.",
        f"Rename items to stock, sku to code and found to matches, everywhere.\n\n{fenced(INVENTORY)}",
    ),
    "write": (
        "Write clear modern Python with docstrings; no third-party packages.",
        """Write a class for a least-recently-used cache whose entries also expire after a number of seconds. It needs
get, put, a length, and a method that removes what has expired. The clock is a parameter.""",
    ),
    "tests": (
        "For the code that follows you write pytest tests: one function for each case, no fixtures.",
        f"Test both functions thoroughly, with empty, touching, nested and unsorted intervals.\n\n{fenced(INTERVALS)}",
    ),
    "port": (
        "Translate code from one language to another, idiomatically, with the same behaviour and names.",
        f"Port this to Go. Use a struct for a payment.\n\n{fenced(LEDGER)}",
    ),
    "json": (
        "Extract data as JSON. Answer with the JSON only, indented by two spaces.",
        f"""Make a list of orders, each with number, date, customer, place, items (name, count, unit_price), total, paid
and note.\n\n{ORDERS}""",
    ),
    "explain": (
        "You explain programming to people who are new to it, in plain words and without lists.",
        """What is a race condition? Explain it with two people who share one bank account, then say how a lock helps
and what new trouble locks can bring.""",
    ),
    "story": (
        "Tell short stories in a quiet style, with few adjectives.",
        "Tell me the story of a lighthouse keeper who finds a letter in a bottle that was addressed to her, by name.",
    ),
}

MESSAGES = {
    kind: [{"role": "system", "content": system}, {"role": "user", "content": question}]
    for kind, (system, question) in TASKS.items()
}
