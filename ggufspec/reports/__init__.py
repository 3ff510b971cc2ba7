"""Results for people: tables on the terminal, as Markdown and CSV, and pages."""
