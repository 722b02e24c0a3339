"""Tables of a page: digits, alignment, markup."""

import pytest

from lib.tables import Table


def test_numbers_have_four_digits_and_wholes_none():
    """4.98476 and 20.3 keep four digits, counts are whole, thousands are grouped, a missing value is a dash."""
    assert (("4.985", "20.30", "64", "1,634", "–"),) == Table("abcde", [(4.98476, 20.3, 64, 1634.2, None)]).rows


def test_words_stand_left_and_numbers_right():
    """A column of words is marked as text; one of numbers, percentages or quantities is not, nor a dash among them."""
    shown = Table(("name", "share", "time"), [("v5e", "8.5%", "2.4 ms"), ("v6e", "–", "14 ms")])._repr_html_()
    assert 2 == shown.count('<td class="text">') and '<th scope="col" class="text">name</th><th scope="col">share</th>' in shown


def test_markup_in_a_cell_is_escaped():
    """What a cell says cannot become markup of the page."""
    assert "&lt;b&gt;" in Table(("x",), [("<b>",)])._repr_html_()


def test_a_row_of_another_length_is_refused():
    """A head of two over a row of three is a mistake of the author."""
    with pytest.raises(ValueError, match="a row of 3 cells under a head of 2"):
        Table(("a", "b"), [(1, 2, 3)])
