"""What a conversion measured: the report as data (`build`), in words (`describe`), as a page (`html`)."""
