from eldr.workload.training import text


def test_markup_becomes_lines():
    page = (
        "<head><title>x</title></head><p>One &amp;\xa0 two<br>three</p><script>no</script><b>4</b>"
    )
    assert text.strip_markup(page) == "One & two\nthree 4"


def test_proofs_are_dropped_across_lines():
    assert text.metamath_statements("a $p |- x $= ( b\n c ) AB $. d $a y $.") == (
        "a $p |- x $= ? $. d $a y $."
    )


def test_icd_codes_get_a_line_each():
    tabular = (
        "<a/><section id='1'><diag><name>A00</name>\n <desc>Cholera</desc>\n"
        "<excludes1><note>fever</note></excludes1><sevenChrDef>gone</sevenChrDef></diag></section>"
    )
    head, section = text.icd_sections(tabular)
    assert head == "<a/>"
    assert text.icd_text(section) == "A00 Cholera\nExcludes: fever;"


def test_wordnet_entries_skip_the_licence_and_join_words():
    data = (
        "  1 licence | text\n"
        "001 05 n 02 hot_dog 0 frank 0 001 @ 002 n 0000 | a sausage; \n"
        "no gloss\n"
    )
    assert text.wordnet_entries(data, "noun") == ["hot dog, frank (noun): a sausage;\n"]


def test_licence_entries_without_text_are_empty():
    assert text.licence_text('{"licenseText": "a\\r\\nb"}') == "a\nb"
    assert text.licence_text('{"licenseText": null}') == ""


def test_only_the_leading_eigen_comment_goes():
    source = (
        "// This file is part of Eigen, a\n// library\n\n#ifndef X\n// This file is part of Eigen\n"
    )
    assert text.without_eigen_header(source).startswith("#ifndef X")


def test_known_lines_are_dropped():
    assert text.without_lines("eins\nEnglish\nzwei", ["English"]) == "eins\nzwei"
