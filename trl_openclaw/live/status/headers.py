"""What browsers are told about the page: where its parts may come from, and who may use them."""

PAGE_HEADERS = {
    # No script, style or picture but the page's own, no request to anywhere else, and no text that becomes markup.
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self'",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
"""For the page, its scripts and its style, which tell nothing of anybody."""

DATA_HEADERS = {**PAGE_HEADERS, "Cache-Control": "no-store"}
"""For what people said, which no browser writes to its disk."""
