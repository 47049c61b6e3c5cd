"""What a report is made of: statistics, tables, figures, pages."""
