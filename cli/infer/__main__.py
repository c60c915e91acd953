from cli.infer import main

if __name__ == "__main__":
    main()
