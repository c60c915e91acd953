from cli.eval import main

if __name__ == "__main__":
    main()
