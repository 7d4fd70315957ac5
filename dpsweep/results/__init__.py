"""Tables, figures, reports and exports of a search."""
