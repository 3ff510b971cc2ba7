"""Ten prompts whose answers are replayed. Written for this project."""

CLASS = """class Inventory:
    def __init__(self):
        self.items = {}

    def add(self, name, count, price):
        if name in self.items:
            self.items[name]["count"] += count
        else:
            self.items[name] = {"count": count, "price": price}

    def remove(self, name, count):
        if name not in self.items:
            raise KeyError(name)
        if self.items[name]["count"] < count:
            raise ValueError("not enough")
        self.items[name]["count"] -= count

    def total(self):
        return sum(item["count"] * item["price"] for item in self.items.values())
"""

PROMPTS = {
    "edit": (
        "Add type hints and a one-line docstring to every method of this class. Give back the whole class.\n\n"
        f"```python\n{CLASS}```"
    ),
    "rename": (
        "Rename `items` to `stock` everywhere in this class, change nothing else, and give back the whole "
        "file.\n\n" + f"```python\n{CLASS}```"
    ),
    "write": (
        "Write a Python function that parses a duration such as '1h30m', '45s' or '2d' into seconds, with "
        "errors for bad input."
    ),
    "tests": (
        "Write pytest tests for this class: adding twice, removing too much, removing an unknown name, and "
        "the total.\n\n" + f"```python\n{CLASS}```"
    ),
    "port": "Translate this class to TypeScript.\n\n" + f"```python\n{CLASS}```",
    "json": (
        "Make a JSON array of six fictional weather stations, each with id, city, latitude, longitude, height"
        " in metres and a list of three sensor names."
    ),
    "explain": "Explain how a hash table handles collisions, and when chaining is better than open addressing.",
    "story": (
        "Write a short story about a lighthouse keeper who finds a radio that receives tomorrow's weather report."
    ),
    "summary": (
        "Summarise the following text in three sentences.\n\nThe study of light has swung between two pictures."
        " Newton thought of small bodies that fly in straight lines; Huygens thought of waves. For a century "
        "Newton's name decided the matter. Then Young let light pass through two narrow slits and saw bright "
        "and dark bands on the wall, as only waves make them, and Fresnel showed by calculation where each "
        "band must be. A hundred years later the photoelectric effect brought the small bodies back: weak "
        "blue light sets electrons free where strong red light does not, which no wave explains. Today we say"
        " that light is neither of the two. It travels as a wave does and is counted as bodies are."
    ),
    "list": "List fifteen common causes of memory leaks in long-running server programs, one line each.",
}
