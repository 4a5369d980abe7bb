if __name__ != "spec_compile.models":
    raise ImportError(
        "import spec_compile.models; the folder 'models' is mapped into the package and is not importable by itself"
    )
