"""What a conversion measured: the report as data (`build`), in short words (`describe`), as a page (`html`)."""
