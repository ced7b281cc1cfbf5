//! Display widths of texts, in terminal columns.

/// Number of terminal columns that a text takes.
pub(crate) fn text_width(text: &str) -> usize {
    ratatui::text::Span::raw(text).width()
}

/// Cuts a text to at most `width` columns, with an ellipsis if it was cut.
pub(crate) fn fit(text: &str, width: usize) -> String {
    if text_width(text) <= width {
        return text.to_owned();
    }
    let mut kept = String::new();
    let mut used = 0;
    for c in text.chars() {
        let char_width = text_width(c.encode_utf8(&mut [0; 4]));
        if used + char_width + 1 > width {
            break;
        }
        used += char_width;
        kept.push(c);
    }
    if width > 0 {
        kept.push('…');
    }
    kept
}

/// The longest beginning of a text that takes at most `width` columns and ends before a comma or a semicolon, so that
/// no part of an enumeration is cut. The whole text if it fits, or if even its first part is wider.
pub(crate) fn whole_parts(text: &str, width: usize) -> &str {
    let mut kept = text;
    while text_width(kept) > width {
        match kept.rfind([',', ';']) {
            Some(end) => kept = &kept[..end],
            None => return text,
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cut_texts_end_with_an_ellipsis() {
        assert_eq!(fit("abcdef", 6), "abcdef");
        assert_eq!(fit("abcdef", 4), "abc…");
        assert_eq!(fit("日本語", 4), "日…");
        assert_eq!(fit("abc", 0), "");
    }

    #[test]
    fn parts_that_do_not_fit_are_left_out_whole() {
        let text = "load 3.2 on 8 processors, 40 % busy, 2 % stolen";
        assert_eq!(whole_parts(text, 80), text);
        assert_eq!(whole_parts(text, 46), "load 3.2 on 8 processors, 40 % busy");
        assert_eq!(whole_parts(text, 30), "load 3.2 on 8 processors");
        // The first part alone is too wide.
        assert_eq!(whole_parts(text, 10), text);
    }
}
